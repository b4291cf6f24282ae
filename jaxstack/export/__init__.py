"""Export of trained models to other programs: StableHLO, ONNX, and a web page that runs the model in a browser."""
