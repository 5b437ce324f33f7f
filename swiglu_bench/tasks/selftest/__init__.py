"""The suite tests itself: its checks must catch implementations that are wrong or cheat, and none that is right."""
