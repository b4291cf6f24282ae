"""Training of weights in the form in which they will be stored: quantized, sparse, clustered or of low rank.

Each method is a file with its rule (`base.WeightRule`); `config` lists them. The rules choose by parameter path.
"""
