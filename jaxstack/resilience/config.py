"""What a run does when something goes wrong."""

from pydantic import Field

from jaxstack.config import Component


class ResilienceConfig(Component):
    """Limits after which a run stops instead of going on."""

    max_skipped_steps: int = Field(default=10, ge=1)
    """Steps in a row whose loss or gradients are not finite are skipped; after this many the run ends with an error."""
