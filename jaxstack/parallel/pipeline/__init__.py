"""Pipeline parallelism: schedules, the assignment of layers to stages, and the execution of a schedule on devices."""
