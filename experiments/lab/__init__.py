"""The rounding-bias contrib/lab: studies that predict first, measure then, and fail where the two part."""
