"""The normalisations: functions of a GraphBuilder, in order in `autopar.capture.normalise`."""
