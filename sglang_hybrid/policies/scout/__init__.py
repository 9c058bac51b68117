"""What happens one layer ahead, and what it is tuned with: predictor, recall, calibration, profile."""
