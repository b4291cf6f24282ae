"""Compression of weights, during training and after it: quantized, sparse, clustered or of low rank.

`matrix` sees weights as matrices, `formats` and `solvers` have the methods, which `config` lists; `during_training` and
`after_training` apply them.
"""
