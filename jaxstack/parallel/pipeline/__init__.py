"""Pipeline parallelism: schedules as tables, the assignment of layers to stages, and the executor of a table."""
