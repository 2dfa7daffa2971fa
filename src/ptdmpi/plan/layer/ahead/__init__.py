"""Multi-token prediction: modules after the last layer that predict tokens further ahead."""
