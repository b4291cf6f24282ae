"""Pipeline parallelism: schedules as tables, how layers are dealt to stages, and the executor of a table."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
