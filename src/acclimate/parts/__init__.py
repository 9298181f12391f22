"""What methods are made of: selection, the Fisher regulariser, sub-networks, BatchNorm statistics, teachers."""
