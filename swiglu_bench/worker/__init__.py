"""The processes in which cases run: the parent's side, the contenders', the judge's."""
