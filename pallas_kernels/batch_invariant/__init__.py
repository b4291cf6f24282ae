"""Operations whose result for a row does not depend on the other rows, nor on their number.

Matmuls in tiles of fixed size, sums in a fixed order, and attention to blocks of keys that begin at fixed positions
(He and Thinking Machines Lab 2025, thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference). In the context
`batch_invariant` models compute with them, so that decoding gives the same bits as a forward pass over whole sequences.
Gradients are those of the usual kernels.
"""
