"""What several tests need: running single kernels, building small models, goldens."""
