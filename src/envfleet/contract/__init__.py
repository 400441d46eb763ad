"""What every layer agrees on: environments, arrays, episodes, errors."""
