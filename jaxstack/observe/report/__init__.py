"""`report.html`: one self-contained page about a run, made from the files of its run directory."""
