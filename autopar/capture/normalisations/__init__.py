"""The normalisations: each a function of a Draft, listed in order in `autopar.capture.normalise`."""
