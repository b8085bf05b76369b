"""Admission: limits, quotas, prices and service levels. A request is refused here or not at all."""
