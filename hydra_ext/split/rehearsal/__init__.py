"""The rehearsal: one watched forward that finds its events, the values between them, and what every cut would carry."""
