"""One forward that is watched: its events, the values between them, and what every cut would carry."""
