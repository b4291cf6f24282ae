"""A matmul per group of rows: `api.grouped_matmul` chooses among the backends of this folder."""
