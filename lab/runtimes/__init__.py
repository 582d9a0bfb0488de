"""Where a lesson runs: local processes (`embedded`) or containers (`compose`)."""
