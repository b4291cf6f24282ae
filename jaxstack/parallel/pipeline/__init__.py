"""Pipeline parallelism: schedules as tables, how layers are dealt to stages, and the executor of a table."""
