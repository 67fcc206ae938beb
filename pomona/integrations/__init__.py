"""Callbacks for the trainers of other libraries, trackers and the Hugging Face Hub.

Each module needs its library only where it is used, and is imported by name.
"""
