"""The normalisations: functions of a Draft, listed in order in `autopar.capture.normalise`."""
