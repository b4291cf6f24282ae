from .layout import plan_layout as plan_layout
from .rehearsal import rehearse as rehearse
from .text import draw_plan as draw_plan
