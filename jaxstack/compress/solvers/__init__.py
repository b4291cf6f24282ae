"""Solvers: methods that find better values than the nearest ones of a format, each paper in its own file."""
