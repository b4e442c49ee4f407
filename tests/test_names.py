"""Functions are named by a verb with its object, or by a noun: a single preposition, pronoun, adverb or auxiliary verb
says nothing at a call, and cannot be searched for."""

import ast

from tests.sources import ROOT, nodes

WORDS = {"again", "ahead", "aside", "asked", "asks", "by", "each", "for", "from", "given", "gone", "good",
         "had", "has", "have", "hear", "here", "how", "in", "into", "is", "it", "late", "least", "like", "may", "mine",
         "most", "not", "now", "of", "on", "once", "one", "only", "other", "said", "saw", "see", "some", "taken",
         "than", "that", "them", "there", "they", "to", "told", "until", "what", "when", "where", "which", "who",
         "why", "with", "wrong"}


def test_no_function_is_named_by_one_of_these_words_alone():
    found = [f"{path.relative_to(ROOT)}: {method.name}" for path, inside in nodes().items() for scope in inside
             if isinstance(scope, ast.Module | ast.ClassDef) for method in scope.body
             if isinstance(method, ast.FunctionDef) and method.name.strip("_") in WORDS
             and "property" not in map(ast.unparse, method.decorator_list)]
    assert found == []
