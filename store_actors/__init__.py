import statefleet.import_names  # noqa: F401  checks that the other packages are Statefleet's, too
