"""Classes of modules of other packages, and how each runs on the operations of this package."""
