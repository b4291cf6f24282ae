from .command import main as main
from .command import make_parser as make_parser
