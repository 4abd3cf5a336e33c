"""What compression does to gradients, and to the weights and accuracy of trainings."""
