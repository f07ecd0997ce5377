"""The engine of the losses over ``hidden @ weight.T + bias`` that never store the logits as a whole.

An operation states what is its own: a `Loss` (the names of its results and inputs) and, for each backend, a `RowKernel`
(the results of tokens whose logits exist, and the gradient of these logits). From these `make_backend` makes the
operators, the autograd function and the backend's function.

There are two strategies, which `sizes.py` chooses between. *Chunks* (`chunks.py`): the logits of all classes for a
chunk of tokens at a time. *Tiles* (`class_blocks.py`): the logits of a block of classes for all tokens. If the classes
are sharded over devices, `vocab_parallel.py` computes a loss by PyTorch's operations.
"""
