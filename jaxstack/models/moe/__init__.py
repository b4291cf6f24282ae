"""Mixture of experts: which experts a token goes to (router), where its rows lie (dispatch), what they compute."""
