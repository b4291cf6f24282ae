from .schedule import SCHEDULES as SCHEDULES
from .schedule import Schedule as Schedule
from .schedule import forward_only as forward_only
from .schedule import validate as validate
from .simulate import describe_schedule as describe_schedule
from .simulate import simulate as simulate
