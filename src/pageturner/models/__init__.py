"""Models: specs (families and configurations as data) and one decoder driven by them. A backend is
given."""
