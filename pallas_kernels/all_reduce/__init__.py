"""All-reduces of small arrays over the GPUs of one process, alone or with the residual addition and norm after them."""
