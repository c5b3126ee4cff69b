"""The routes of pictures: made from text, made from pictures, and by chat."""
