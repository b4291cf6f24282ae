"""Models on disk: runs, compressed runs and Hugging Face checkpoints, behind one interface.

A stored format is a subclass of `StoredModel`; importing its file makes it known to `StoredModel.open`.
"""

from jaxstack.stored import huggingface as huggingface
from jaxstack.stored import run_directory as run_directory
from jaxstack.stored.model import StoredModel as StoredModel
