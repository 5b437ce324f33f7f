"""Child processes: started, asked, stopped and ended, on one device or on many; what the death of one costs."""
