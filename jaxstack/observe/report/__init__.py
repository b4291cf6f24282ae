"""`report.html`: one self-contained page about a run, made from the files of its run directory."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
