"""How a call is checked, described and launched, and what a backward needs of its forward."""
