"""Trained models written for other programs: StableHLO, ONNX, and a page that runs the model in a browser."""
