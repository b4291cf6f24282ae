"""Models on disk: runs, compressed runs and Hugging Face checkpoints, behind one interface.

A stored format is a subclass of `StoredModel` in its own file; importing the file makes it known to `StoredModel.open`.
"""

from jaxstack.stored import compressed_run as compressed_run
from jaxstack.stored import huggingface as huggingface
from jaxstack.stored import training_run as training_run
from jaxstack.stored.model import StoredModel as StoredModel
