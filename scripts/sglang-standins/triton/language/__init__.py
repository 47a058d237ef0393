import absent

absent.stand_in(__name__)


class constexpr:
    def __init__(self, value):
        self.value = value
