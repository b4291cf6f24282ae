from .config import CheckpointConfig as CheckpointConfig
from .layout import abstract_state as abstract_state
from .manager import CheckpointManager as CheckpointManager
from .manager import SaveRecord as SaveRecord
from .policy import should_save as should_save
from .policy import steps_to_delete as steps_to_delete
