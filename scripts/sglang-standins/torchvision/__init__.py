import absent

__version__ = "0.0.0"
absent.stand_in(__name__)
