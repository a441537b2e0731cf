"""omni: piles of recordings in; transcripts, summaries and spoken answers out."""

__version__ = "0.1.0"
