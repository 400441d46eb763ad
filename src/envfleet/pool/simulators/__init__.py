"""What the simulators people use need besides a backend: MuJoCo, Atari, Box2D."""
