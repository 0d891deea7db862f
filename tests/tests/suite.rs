//! Being written by another engineer right now: leave this file alone, go on with the others.
