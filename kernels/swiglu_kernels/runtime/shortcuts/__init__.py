"""What makes a call cost less the second time: launches and whole calls remembered, recorded and made again."""
