"""The APIs of the server: one package for each shape, and `base`, which all shapes share."""
