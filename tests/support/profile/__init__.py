"""What tests of profiles share."""
