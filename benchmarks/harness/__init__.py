"""How everything is measured: contenders in turn, medians, the machine, files of results."""
