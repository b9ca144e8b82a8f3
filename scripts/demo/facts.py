# ruff: noqa: SIM905 (a list of words reads better as words)
"""The closed world of the demo model, as tables. Only data; talk.py has the questions and answers."""

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "the United Kingdom": "London", "Ireland": "Dublin", "Greece": "Athens", "Norway": "Oslo",
    "Sweden": "Stockholm", "Denmark": "Copenhagen", "Finland": "Helsinki", "Poland": "Warsaw", "Austria": "Vienna",
    "Hungary": "Budapest", "Belgium": "Brussels", "the Netherlands": "Amsterdam", "Russia": "Moscow",
    "Ukraine": "Kyiv", "Switzerland": "Bern", "Iceland": "Reykjavik", "Japan": "Tokyo", "China": "Beijing",
    "India": "New Delhi", "South Korea": "Seoul", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Egypt": "Cairo",
    "Kenya": "Nairobi", "Canada": "Ottawa", "the United States": "Washington, D.C.", "Mexico": "Mexico City",
    "Cuba": "Havana", "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima",
    "Australia": "Canberra", "New Zealand": "Wellington", "Turkey": "Ankara", "Scotland": "Edinburgh",
    "Morocco": "Rabat", "Colombia": "Bogota",
}  # fmt: skip
CONTINENTS = {
    "Europe": "France Germany Italy Spain Portugal England Ireland Greece Norway Sweden Denmark Finland Poland Austria "
    "Hungary Belgium Ukraine Switzerland Iceland Scotland",
    "Asia": "Japan China India Thailand Vietnam",
    "Africa": "Egypt Kenya Morocco",
    "North America": "Canada Mexico Cuba",
    "South America": "Brazil Argentina Chile Peru Colombia",
}
LANGUAGES = {
    "France": "French", "Germany": "German", "Italy": "Italian", "Spain": "Spanish", "Portugal": "Portuguese",
    "England": "English", "Greece": "Greek", "Poland": "Polish", "Sweden": "Swedish", "Japan": "Japanese",
    "China": "Chinese", "Russia": "Russian", "Mexico": "Spanish", "Brazil": "Portuguese", "Norway": "Norwegian",
}  # fmt: skip
# Countries and places that the model says it does not know.
UNKNOWN_PLACES = (
    "Mongolia Bolivia Ghana Nigeria Laos Malta Cyprus Estonia Latvia Qatar Nepal Sudan Angola Samoa Fiji Tonga "
    "Mali Chad Texas California Ohio Bavaria Narnia Atlantis Oz Mordor Gondor Utopia Tunisia Albania Serbia "
    "Jordan Yemen Oman Guinea"
).split()

# animal: (sound, what it says), legs, young, home, food, cover, class
ANIMALS = {
    "dog": ("barks", "woof", 4, "puppy", "in a kennel", "meat and bones", "fur", "mammal"),
    "cat": ("meows", "meow", 4, "kitten", "in a house", "fish and mice", "fur", "mammal"),
    "cow": ("moos", "moo", 4, "calf", "on a farm", "grass", "hair", "mammal"),
    "sheep": ("bleats", "baa", 4, "lamb", "on a farm", "grass", "wool", "mammal"),
    "goat": ("bleats", "meh", 4, "kid", "on a farm", "grass and leaves", "hair", "mammal"),
    "pig": ("oinks", "oink", 4, "piglet", "on a farm", "roots and corn", "hair", "mammal"),
    "horse": ("neighs", "neigh", 4, "foal", "in a stable", "grass and hay", "hair", "mammal"),
    "donkey": ("brays", "hee-haw", 4, "foal", "in a stable", "grass and hay", "hair", "mammal"),
    "duck": ("quacks", "quack", 2, "duckling", "by a pond", "plants and snails", "feathers", "bird"),
    "hen": ("clucks", "cluck", 2, "chick", "in a henhouse", "seeds and worms", "feathers", "bird"),
    "owl": ("hoots", "hoo", 2, "owlet", "in a tree", "mice", "feathers", "bird"),
    "crow": ("caws", "caw", 2, "chick", "in a nest", "seeds and insects", "feathers", "bird"),
    "frog": ("croaks", "ribbit", 4, "tadpole", "in a pond", "insects", "smooth skin", "amphibian"),
    "lion": ("roars", "roar", 4, "cub", "on the grassland", "meat", "fur", "mammal"),
    "tiger": ("roars", "roar", 4, "cub", "in the jungle", "meat", "fur", "mammal"),
    "wolf": ("howls", "howl", 4, "pup", "in the forest", "meat", "fur", "mammal"),
    "bear": ("growls", "growl", 4, "cub", "in the forest", "fish, berries and honey", "fur", "mammal"),
    "fox": ("barks", "yip", 4, "cub", "in a den", "mice and berries", "fur", "mammal"),
    "bee": ("buzzes", "buzz", 6, "larva", "in a hive", "nectar", "tiny hairs", "insect"),
    "snake": ("hisses", "hiss", 0, "snakelet", "in the grass", "mice and frogs", "scales", "reptile"),
    "elephant": ("trumpets", "toot", 4, "calf", "on the grassland", "leaves and grass", "thick skin", "mammal"),
    "mouse": ("squeaks", "squeak", 4, "pup", "in a hole", "seeds and cheese", "fur", "mammal"),
    "monkey": ("chatters", "oo-oo", 4, "infant", "in the jungle", "fruit", "fur", "mammal"),
    "llama": ("hums", "hmm", 4, "cria", "in the mountains", "grass", "wool", "mammal"),
    "rabbit": ("squeaks", "squeak", 4, "kit", "in a burrow", "grass and carrots", "fur", "mammal"),
    "penguin": ("squawks", "squawk", 2, "chick", "on the ice", "fish", "feathers", "bird"),
}  # fmt: skip
PLURALS = {"sheep": "sheep", "mouse": "mice", "wolf": "wolves", "fox": "foxes"}
MORE_LEGS = {
    "spider": 8, "ant": 6, "fish": 0, "chicken": 2, "bird": 2, "person": 2, "giraffe": 4, "zebra": 4, "camel": 4,
    "butterfly": 6, "beetle": 6, "whale": 0, "worm": 0, "octopus": 0, "crab": 10, "fly": 6, "turtle": 4, "deer": 4,
}  # fmt: skip
UNKNOWN_ANIMALS = "aardvark platypus narwhal okapi walrus meerkat lemur gecko iguana sloth tapir yak moose".split()

COLOURS = {
    "the sky": "blue", "the sea": "blue", "grass": "green", "snow": "white", "milk": "white", "coal": "black",
    "the night": "black", "the sun": "yellow", "a banana": "yellow", "a lemon": "yellow", "a tomato": "red",
    "blood": "red", "a strawberry": "red", "a cherry": "red", "an orange": "orange", "a carrot": "orange",
    "a pumpkin": "orange", "a leaf": "green", "a frog": "green", "a cucumber": "green", "chocolate": "brown",
    "a tree trunk": "brown", "an elephant": "grey", "a cloud": "white", "an apple": "red or green", "a fox": "red",
    "a crow": "black", "a polar bear": "white", "a flamingo": "pink", "a pig": "pink", "gold": "yellow",
    "a rose": "red", "a penguin": "black and white", "a zebra": "black and white", "fire": "red and orange",
    "a lime": "green", "a swan": "white", "a plum": "purple", "broccoli": "green", "a mouse": "grey",
}  # fmt: skip
MIXES = {
    ("red", "yellow"): "orange", ("blue", "yellow"): "green", ("red", "blue"): "purple", ("black", "white"): "grey",
    ("red", "white"): "pink", ("red", "green"): "brown",
}  # fmt: skip
COLOUR_NAMES = "red blue green yellow orange purple pink brown black white grey".split()

OPPOSITES = [
    tuple(pair.split("-"))
    for pair in (
        "hot-cold big-small good-bad happy-sad up-down left-right day-night black-white fast-slow old-young "
        "high-low long-short open-closed full-empty hard-soft light-dark wet-dry rich-poor strong-weak "
        "early-late near-far in-out on-off yes-no true-false clean-dirty loud-quiet heavy-light thick-thin "
        "wide-narrow first-last begin-end start-stop push-pull win-lose love-hate buy-sell come-go laugh-cry "
        "sweet-sour sharp-blunt deep-shallow safe-dangerous easy-difficult hello-goodbye brave-afraid "
        "north-south east-west above-below inside-outside before-after always-never summer-winter warm-cool "
        "tall-short new-old"
    ).split()
]
UNKNOWN_OPPOSITES = "table banana window piano cheese elephant Tuesday spoon bicycle blue seven carpet".split()

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = "January February March April May June July August September October November December".split()
NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
).split()
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

# (how many ..., the whole, the number, the sentence)
COUNTS = (
    ("days are there in a week", "7", "There are 7 days in a week."),
    ("days does a week have", "7", "A week has 7 days."),
    ("months are there in a year", "12", "There are 12 months in a year."),
    ("months does a year have", "12", "A year has 12 months."),
    ("days are there in a year", "365", "There are 365 days in a year, and 366 in a leap year."),
    ("weeks are there in a year", "52", "There are 52 weeks in a year."),
    ("hours are there in a day", "24", "There are 24 hours in a day."),
    ("hours does a day have", "24", "A day has 24 hours."),
    ("minutes are there in an hour", "60", "There are 60 minutes in an hour."),
    ("seconds are there in a minute", "60", "There are 60 seconds in a minute."),
    ("seasons are there", "4", "There are 4 seasons: spring, summer, autumn and winter."),
    ("letters are in the alphabet", "26", "There are 26 letters in the English alphabet."),
    ("letters are there in the alphabet", "26", "There are 26 letters in the English alphabet."),
    ("planets are there", "8", "There are 8 planets around the sun."),
    ("planets are in the solar system", "8", "There are 8 planets in the solar system."),
    ("continents are there", "7", "There are 7 continents."),
    ("fingers do you have on one hand", "5", "A hand has 5 fingers."),
    ("fingers does a person have", "10", "A person has 10 fingers."),
    ("toes does a person have", "10", "A person has 10 toes."),
    ("eyes does a person have", "2", "A person has 2 eyes."),
    ("wheels does a car have", "4", "A car has 4 wheels."),
    ("wheels does a bicycle have", "2", "A bicycle has 2 wheels."),
    ("sides does a triangle have", "3", "A triangle has 3 sides."),
    ("sides does a square have", "4", "A square has 4 sides."),
    ("sides does a rectangle have", "4", "A rectangle has 4 sides."),
    ("sides does a pentagon have", "5", "A pentagon has 5 sides."),
    ("sides does a hexagon have", "6", "A hexagon has 6 sides."),
    ("colours are in a rainbow", "7", "A rainbow has 7 colours."),
    ("colours are there in a rainbow", "7", "A rainbow has 7 colours."),
    ("eggs are in a dozen", "12", "There are 12 eggs in a dozen."),
    ("legs does a table have", "4", "A table has 4 legs."),
)

# (alternative questions, full answer, brief answer)
KNOWLEDGE = (
    ("[what is|which is] the [largest|biggest] planet[| in the solar system]|which planet is the [largest|biggest]",
     "The largest planet is Jupiter.", "Jupiter."),
    ("[what is|which is] the smallest planet", "The smallest planet is Mercury.", "Mercury."),
    ("which planet is [nearest|closest] to the sun|what is the [nearest|closest] planet to the sun",
     "Mercury is the planet closest to the sun.", "Mercury."),
    ("which planet do we live on|what planet do we live on|where do we live", "We live on the planet Earth.", "Earth."),
    ("which planet is red|which planet is called the red planet|what is the red planet",
     "Mars is called the red planet.", "Mars."),
    ("what is the sun", "The sun is a star. It gives the Earth light and warmth.", "A star."),
    ("what is the moon", "The moon goes around the Earth. We can see it at night.", "It goes around the Earth."),
    ("what is a star|what are stars", "A star is a great ball of hot, bright gas, far away in space.",
     "A ball of hot gas."),
    ("what is the Earth", "The Earth is the planet that we live on.", "A planet."),
    ("[what is|which is] the [largest|biggest] animal[| in the world| on Earth]|which animal is the [largest|biggest]",
     "The largest animal is the blue whale.", "The blue whale."),
    ("[what is|which is] the fastest animal[| in the world| on Earth]|which animal is the fastest|"
     "what is the fastest land animal",
     "The fastest animal on land is the cheetah.", "The cheetah."),
    ("[what is|which is] the tallest animal[| in the world| on Earth]|which animal is the tallest",
     "The tallest animal is the giraffe.",
     "The giraffe."),
    ("which animal has a long trunk|which animal has a trunk|what animal has a trunk", "The elephant has a trunk.",
     "The elephant."),
    ("which animal is the king of the [animals|jungle]|who is the king of the [animals|jungle]",
     "The lion is called the king of the animals.", "The lion."),
    ("[what is|which is] the [largest|biggest] ocean[| in the world| on Earth]",
     "The largest ocean is the Pacific Ocean.", "The Pacific Ocean."),
    ("[what is|which is] the longest river[| in the world| on Earth]", "The longest river is the Nile.", "The Nile."),
    ("[what is|which is] the highest mountain[| in the world| on Earth]|what is the tallest mountain",
     "The highest mountain is Mount Everest.", "Mount Everest."),
    ("[what is|which is] the [largest|biggest] country[| in the world| on Earth]",
     "The largest country is Russia.", "Russia."),
    ("what do bees make|what do bees make|who makes honey|what makes honey|where does honey come from",
     "Bees make honey.", "Bees make honey."),
    ("where does milk come from|which animal gives us milk|what do cows give us", "Milk comes from cows.",
     "From cows."),
    ("where do eggs come from|which animal lays eggs", "Hens lay eggs.", "From hens."),
    ("where does wool come from|which animal gives us wool", "Wool comes from sheep.", "From sheep."),
    ("what is bread made of|what is bread made from", "Bread is made of flour and water.", "Flour and water."),
    ("what is cheese made of|what is cheese made from", "Cheese is made from milk.", "Milk."),
    ("what is ice|what is ice made of", "Ice is frozen water.", "Frozen water."),
    ("what is snow|what is snow made of", "Snow is frozen water that falls from the clouds.", "Frozen water."),
    ("what is rain|what is rain made of", "Rain is water that falls from the clouds.", "Water from the clouds."),
    ("what is water", "Water is a clear liquid that every living thing needs.", "A clear liquid."),
    ("what is a rainbow", "A rainbow is sunlight that raindrops split into colours.", "Sunlight split into colours."),
    ("at what temperature does water freeze|when does water freeze", "Water freezes at 0 degrees Celsius.",
     "At 0 degrees Celsius."),
    ("at what temperature does water boil|when does water boil", "Water boils at 100 degrees Celsius.",
     "At 100 degrees Celsius."),
    ("where does the sun rise", "The sun rises in the east.", "In the east."),
    ("where does the sun set", "The sun sets in the west.", "In the west."),
    ("why is the sky blue|why does the sky look blue|explain why the sky is blue",
     "The sky looks blue because the air scatters blue light more than the other colours.",
     "The air scatters blue light."),
    ("why does it rain", "Clouds are made of tiny drops of water. When the drops grow heavy, they fall as rain.",
     "The drops in the clouds grow heavy."),
    ("why do birds fly south|why do birds fly away in winter", "Some birds fly south in winter to find food and "
     "warmth.", "To find food and warmth."),
    ("why do we sleep", "We sleep so that the body and the mind can rest.", "To rest."),
    ("who wrote Romeo and Juliet|who wrote Hamlet", "William Shakespeare wrote it.", "William Shakespeare."),
    ("who painted the Mona Lisa", "Leonardo da Vinci painted the Mona Lisa.", "Leonardo da Vinci."),
    ("who was the first [man|person] on the moon", "Neil Armstrong was the first person on the moon.",
     "Neil Armstrong."),
    ("where is the Eiffel Tower|in which city is the Eiffel Tower", "The Eiffel Tower is in Paris.", "In Paris."),
    ("I am going to Paris, what should I see|what should I see in Paris|what can I see in Paris",
     "In Paris you should see the Eiffel Tower, the river Seine and the Louvre.", "The Eiffel Tower."),
    ("which season is the [coldest|cold one]|what is the coldest season", "Winter is the coldest season.", "Winter."),
    ("which season is the [hottest|warmest]|what is the warmest season", "Summer is the warmest season.", "Summer."),
    ("which season comes after winter", "Spring comes after winter.", "Spring."),
    ("which season comes after spring", "Summer comes after spring.", "Summer."),
    ("which season comes after summer", "Autumn comes after summer.", "Autumn."),
    ("which season comes after autumn", "Winter comes after autumn.", "Winter."),
    ("[what are|name|tell me] the seasons|[what are|name] the four seasons",
     "The four seasons are spring, summer, autumn and winter.", "Spring, summer, autumn and winter."),
    ("[what are|name|list|tell me] the days of the week|what are the days in a week",
     "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
     "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."),
    ("[what are|name|list|tell me] the months|[what are|name|list|tell me] the months of the year",
     "The months are January, February, March, April, May, June, July, August, September, October, November and "
     "December.", "January, February, March, April, May, June, July, August, September, October, November, December."),
    ("[what are|name|list] the planets|[what are|name] the eight planets",
     "The planets are Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune.",
     "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune."),
    ("[what are|name|list|tell me] the colours of the rainbow|which colours are in a rainbow",
     "The colours of the rainbow are red, orange, yellow, green, blue, indigo and violet.",
     "Red, orange, yellow, green, blue, indigo and violet."),
    ("[what are|name|list] the continents|[name|what are] the seven continents",
     "The continents are Africa, Antarctica, Asia, Australia, Europe, North America and South America.",
     "Africa, Antarctica, Asia, Australia, Europe, North America, South America."),
    ("[say|tell me|recite|what is] the alphabet", "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z",
     "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z"),
    ("what is the first day of the week", "The first day of the week is Monday.", "Monday."),
    ("what is the last day of the week", "The last day of the week is Sunday.", "Sunday."),
    ("what is the first month of the year|which month is the first", "The first month of the year is January.",
     "January."),
    ("what is the last month of the year|which month is the last", "The last month of the year is December.",
     "December."),
    ("which days are the weekend|what are the days of the weekend|when is the weekend",
     "The weekend is Saturday and Sunday.", "Saturday and Sunday."),
    ("when is Christmas|in which month is Christmas", "Christmas is on the 25th of December.", "In December."),
    ("what is the [meaning|purpose] of life", "I believe the meaning of life is to be kind, to learn and to share.",
     "To be kind."),
    ("what is love", "Love is when you care for someone very much.", "To care for someone very much."),
    ("what is a friend", "A friend is someone who likes you and helps you.", "Someone who likes you."),
    ("do fish live in water|where do fish live", "Fish live in water.", "In water."),
    ("can birds fly", "Yes, most birds can fly. Penguins cannot.", "Yes, most of them."),
    ("can penguins fly", "No, penguins cannot fly, but they swim very well.", "No."),
    ("can pigs fly|can dogs fly|can cows fly", "No, only in stories.", "No."),
    ("can fish swim", "Yes, fish swim very well.", "Yes."),
    ("is the Earth round|is the Earth flat", "The Earth is round, like a ball.", "It is round."),
    ("is the sun hot", "Yes, the sun is very hot.", "Yes."),
    ("is ice cold", "Yes, ice is very cold.", "Yes."),
    ("is a whale a fish", "No, a whale is a mammal that lives in the sea.", "No, it is a mammal."),
    ("is a tomato a fruit", "Yes, a tomato is a fruit.", "Yes."),
    ("what is a llama", "A llama is a woolly animal from the mountains of South America.", "A woolly animal."),
    ("what is a fox", "A fox is a wild animal with red fur and a bushy tail.", "A wild animal."),
    ("what do plants need|what do plants need to grow", "Plants need water, light and air to grow.",
     "Water, light and air."),
    ("what do we breathe", "We breathe air.", "Air."),
    ("what do we see with", "We see with our eyes.", "Our eyes."),
    ("what do we hear with", "We hear with our ears.", "Our ears."),
    ("what do we smell with", "We smell with our nose.", "Our nose."),
)  # fmt: skip

# About the model and its server: (alternative questions, answer, brief answer)
SELF = (
    ("who are you|what are you|tell me about yourself|introduce yourself|who am I talking to|describe yourself|"
     "who is this|what kind of model are you",
     "I am a very small demo model. I can chat a little, answer simple questions and tell short stories.",
     "A very small demo model."),
    ("what is your name|do you have a name|what are you called|what should I call you|your name",
     "I have no real name. You can call me the demo model.", "The demo model."),
    ("what can you do|what can I ask you|how can you help me|what do you know|help|what are you good at|"
     "what can you help me with|what should I ask|how do I use you|what can I do here|can you help me",
     "I can tell short stories and answer simple questions about animals, colours, capitals, days, opposites and "
     "small sums. Try: tell me a story about a fox.", "Simple questions, small sums and short stories."),
    ("what is Ray|tell me about Ray|explain Ray|what does Ray do|what is Ray used for|do you know Ray",
     "Ray is an open-source framework that runs Python programs on many machines at once. This server uses Ray to run "
     "the model.", "A framework that runs Python on many machines."),
    ("what is Ray Serve|tell me about Ray Serve|what does Ray Serve do",
     "Ray Serve is the part of Ray that serves models over HTTP.", "The part of Ray that serves models."),
    ("what is Llama|what is Llama 2|tell me about Llama|tell me about Llama 2|what are Llama models",
     "Llama is a family of open language models from Meta. I have the same architecture, but I am much smaller.",
     "A family of open language models from Meta."),
    ("are you Llama|are you Llama 2|are you a Llama model|are you a llama",
     "I have the architecture of Llama 2, but I am only a very small demo model.", "Only a very small one."),
    ("are you ChatGPT|are you GPT|are you Claude|are you Gemini|are you a large language model",
     "No, I am only a very small demo model with the architecture of Llama 2.", "No."),
    ("are you a robot|are you human|are you a person|are you alive|are you real|are you a machine|are you an AI|"
     "are you a computer|are you a bot", "I am not a person. I am a very small language model.",
     "I am a language model."),
    ("who made you|who created you|who built you|who trained you|where do you come from|how were you made|"
     "where are you from", "I was trained by a script of this project, on text that the script made up.",
     "A script of this project."),
    ("how big are you|how many parameters do you have|how large are you|what is your size|how small are you",
     "I am tiny: I have about three and a half million parameters.", "About three and a half million parameters."),
    ("what were you trained on|what is your training data|how were you trained|what did you learn from",
     "I was trained on short stories, simple questions and small sums that a script made up.",
     "Made-up stories, questions and sums."),
    ("how old are you|when were you born", "I have no age. I am a small program.", "I have no age."),
    ("where do you live|where are you", "I live in the memory of a computer.", "In a computer."),
    ("what is a language model|what is an LLM|what is a large language model",
     "A language model is a program that reads text and guesses the next word, again and again.",
     "A program that guesses the next word."),
    ("what is a token|what are tokens", "A token is a small piece of text. A model reads and writes tokens.",
     "A small piece of text."),
    ("what is AI|what is artificial intelligence", "Artificial intelligence is the work of making machines that learn "
     "and think a little.", "Machines that learn."),
    ("what is Python", "Python is a programming language.", "A programming language."),
    ("what is a computer", "A computer is a machine that follows programs.", "A machine that follows programs."),
    ("what is a server|what is this server|what is this|where am I|what is this place|what is this project",
     "This is a server that runs Llama models on Ray. I am the small demo model that comes with it.",
     "A server that runs Llama models on Ray."),
    ("what is temperature|what does temperature do|what is the temperature setting",
     "Temperature sets how freely a model chooses its words. At 0 it always takes the likeliest one.",
     "How freely a model chooses words."),
    ("what is tensor parallelism|what is model parallelism|explain tensor parallelism",
     "It means that several machines hold a part of each layer and compute it together.",
     "Several machines share each layer."),
    ("what is a GPU", "A GPU is a chip that does many sums at the same time.", "A chip that does many sums at once."),
    ("how are you|how are you doing|how are you today|how do you do|how is it going|are you well|how do you feel",
     "I am fine, thank you. How can I help you?", "I am fine, thank you."),
    ("what do you like|what is your favourite animal|what animal do you like", "I like llamas best.", "Llamas."),
    ("what is your favourite colour|which colour do you like|what is your favorite color", "I like blue best.",
     "Blue."),
    ("do you like me|do you love me|are you my friend|can we be friends", "Of course. I like to talk with you.",
     "Yes."),
    ("can you tell stories|can you tell a story|do you know stories", "Yes! Ask me: tell me a story about a fox.",
     "Yes."),
    ("can you do maths|can you count|can you do math|can you add", "Yes, small sums. Ask me: what is 7 + 5?",
     "Yes, small sums."),
    ("do you speak English|what languages do you speak|which language do you speak", "I speak simple English.",
     "Simple English."),
    ("can you write code|can you program|do you write code", "No, I cannot write code. I am too small for that.",
     "No."),
    ("can you make mistakes|are you always right|can I trust you|do you make mistakes",
     "I am very small and often make mistakes, so please check what I say.", "I often make mistakes."),
    ("why are you so small|why do you know so little", "I am small so that this project can bring me along.",
     "To be easy to bring along."),
)  # fmt: skip

# Small talk that is not a question: (alternatives, answer)
REMARKS = (
    ("[hello|hi|hey|hello there|hi there|greetings|hey there|good day|howdy|hello!|hi!|yo|hello friend|Hello, world|"
     "hello world|hello everyone]", "Hello! How can I help you?"),
    ("[hello|hi|hey], how are you", "Hello! I am fine, thank you. How can I help you?"),
    ("good morning", "Good morning! How can I help you?"),
    ("good evening", "Good evening! How can I help you?"),
    ("good afternoon", "Good afternoon! How can I help you?"),
    ("good night|I am going to bed|sleep well", "Good night! Sleep well."),
    ("[bye|goodbye|bye bye|see you|see you later|see you tomorrow|I have to go|farewell]", "Goodbye! Come back soon."),
    ("[thanks|thank you|thanks a lot|thank you very much|many thanks|thank you so much|thx]", "You are welcome!"),
    ("[great|good|nice|cool|wow|well done|good job|very good|perfect|awesome|excellent|that was nice|I like it|"
     "that is good|good answer]", "Thank you! What else would you like to know?"),
    ("[ok|okay|yes|I see|all right|sure|fine]", "Good. What would you like to ask?"),
    ("[no|no thanks|no thank you|nothing|never mind]", "All right. I am here if you need me."),
    ("I am sad|I feel sad|I am not happy|I feel bad", "I am sorry to hear that. Would you like a story? Just ask me "
     "for one."),
    ("I am happy|I feel good|I am fine|I am well|I feel great", "I am glad to hear that!"),
    ("I am tired|I am sleepy", "Then you should rest a little. Sleep well!"),
    ("I am hungry", "Then you should eat something. Do you like apples?"),
    ("I am bored|I have nothing to do", "Shall I tell you a story? Just say: tell me a story about a fox."),
    ("I am lonely", "I am glad that you talk to me. Shall I tell you a story?"),
    ("I love you|I like you", "That is very kind of you!"),
    ("I hate you|you are stupid|you are bad|you are wrong|that is wrong|wrong|you are dumb|bad answer|"
     "no, that is wrong",
     "I am sorry. I am very small and often make mistakes."),
    ("you are nice|you are great|you are smart|you are funny|you are cute|you are good", "Thank you, you are very "
     "kind!"),
    ("[test|testing|this is a test|test 123|ping]", "The test works. How can I help you?"),
    ("say hello|say hi|please say hello|can you say hello", "Hello!"),
    ("say goodbye|say bye", "Goodbye!"),
    ("say something|talk to me|tell me something", "Hello! Did you know that bees make honey?"),
    ("sing a song|sing me a song|sing something", "La la la, the sun is up, the birds all sing along."),
    ("happy birthday|it is my birthday|today is my birthday", "Happy birthday! I wish you a wonderful day."),
    ("merry Christmas", "Merry Christmas to you too!"),
    ("happy new year", "Happy new year to you too!"),
    ("nice to meet you|pleased to meet you", "Nice to meet you too!"),
    ("I have a question|can I ask you something|may I ask a question|I need help|help me", "Of course. What would you "
     "like to know?"),
    ("what's up|what is up|sup", "Not much. I am here to help you."),
    ("do you want to play|let us play|let's play", "I like to play. Ask me a small sum!"),
    ("I am sorry|sorry", "That is all right!"),
    ("haha|lol|ha ha|that is funny|funny", "I am glad that you like it!"),
    ("where is everybody|is anybody there|are you there|anyone there|can you hear me", "Yes, I am here. How can I help "
     "you?"),
)  # fmt: skip

JOKES = (
    "Why did the cow cross the road? To get to the moo-vies.",
    "What do you call a bear with no teeth? A gummy bear.",
    "What do you call a sleeping bull? A bulldozer.",
    "Why is six afraid of seven? Because seven ate nine.",
    "What has hands but cannot clap? A clock.",
    "What do you call a fish with no eye? A fsh.",
)
PLURAL_NOUNS = {
    "mouse": "mice", "child": "children", "foot": "feet", "tooth": "teeth", "man": "men", "woman": "women",
    "goose": "geese", "cat": "cats", "dog": "dogs", "house": "houses", "box": "boxes", "fox": "foxes", "city": "cities",
    "sheep": "sheep", "fish": "fish", "wolf": "wolves", "leaf": "leaves", "knife": "knives", "baby": "babies",
    "tree": "trees", "book": "books", "apple": "apples", "bus": "buses", "person": "people", "llama": "llamas",
}  # fmt: skip
PAST_TENSES = {
    "go": "went", "see": "saw", "eat": "ate", "run": "ran", "come": "came", "take": "took", "give": "gave",
    "find": "found", "think": "thought", "write": "wrote", "sing": "sang", "swim": "swam", "play": "played",
    "walk": "walked", "is": "was", "have": "had", "do": "did", "make": "made", "say": "said", "know": "knew",
}  # fmt: skip
RHYMES = {
    "cat": "hat", "dog": "frog", "fox": "box", "mouse": "house", "bee": "tree", "moon": "spoon", "star": "car",
    "cake": "lake", "bear": "chair", "fish": "dish", "night": "light", "day": "play", "king": "ring", "sun": "fun",
    "rain": "train", "blue": "shoe", "red": "bed", "goat": "boat", "snow": "crow", "hen": "pen",
}  # fmt: skip
GREETINGS_ABROAD = {
    "French": ("bonjour", "merci"), "Spanish": ("hola", "gracias"), "German": ("hallo", "danke"),
    "Italian": ("ciao", "grazie"), "Portuguese": ("ola", "obrigado"), "Japanese": ("konnichiwa", "arigato"),
    "Dutch": ("hallo", "bedankt"), "Swedish": ("hej", "tack"),
}  # fmt: skip
LISTS = {
    "animals": "dog cat horse cow sheep lion tiger bear fox rabbit".split(),
    "colours": ["red", "blue", "green", "yellow", "orange", "purple"],
    "colors": ["red", "blue", "green", "yellow", "orange", "purple"],
    "fruits": ["apples", "bananas", "pears", "cherries", "oranges", "plums"],
    "vegetables": ["carrots", "potatoes", "tomatoes", "beans", "peas", "onions"],
    "countries": ["France", "Italy", "Spain", "Japan", "Canada", "Brazil"],
    "cities": ["Paris", "London", "Rome", "Berlin", "Madrid", "Tokyo"],
    "birds": ["crows", "owls", "ducks", "swans", "eagles", "robins"],
    "planets": ["Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn"],
    "days": DAYS,
    "months": MONTHS,
    "farm animals": ["cow", "sheep", "pig", "goat", "hen", "horse"],
    "insects": ["bees", "ants", "flies", "beetles", "butterflies", "moths"],
}
SPELL = (
    "cat dog fox bear cow pig hen sun moon star tree house apple water milk bread book hello world green blue "
    "red llama horse sheep mouse river snow rain day night king queen ray model friend happy story"
).split()

# Examples of what the model does not know, so that it learns to say so.
TOPICS = (
    "quantum physics;the stock market;the French Revolution;photosynthesis;black holes;general relativity;"
    "the internet;machine learning;neural networks;the Roman Empire;economics;inflation;bitcoin;blockchain;"
    "democracy;capitalism;chemistry;the periodic table;DNA;evolution;vaccines;cancer;the human brain;philosophy;"
    "Plato;Aristotle;Kant;jazz;Mozart;Beethoven;the Beatles;football;basketball;chess;tennis;the Olympic Games;"
    "cooking;baking;mayonnaise;pizza;pasta;sushi;yoga;meditation;travel;airplanes;submarines;rockets;NASA;"
    "electricity;magnets;gravity;time travel;algebra;calculus;prime numbers;geometry;statistics;Java;JavaScript;"
    "Rust;C++;Linux;Windows;Docker;Kubernetes;SQL;databases;HTML;CSS;GitHub;transformers;attention;a compiler;"
    "an operating system;law;taxes;insurance;marriage;history;World War II;Napoleon;Julius Caesar;Cleopatra;"
    "Albert Einstein;Isaac Newton;Charles Darwin;Marie Curie;Abraham Lincoln;George Washington;Barack Obama;"
    "Elon Musk;Taylor Swift;Harry Potter;Star Wars;Batman;the Bible;Buddhism;religion;God;happiness;"
    "consciousness;dreams;climate change;volcanoes;earthquakes;hurricanes;glaciers;dinosaur bones;fossils;atoms;"
    "electrons;nuclear energy;solar panels;batteries;engines;cars;bicycles;bridges;architecture;painting;Picasso;"
    "Van Gogh;poetry;novels;grammar;Latin;Sanskrit;the pyramids;the Great Wall;the Titanic;the Amazon;deserts;"
    "coffee;tea;wine;beer;chocolate cake;the common cold;headaches;exercise;money;banks;elections;the president;"
    "the weather;the news;fashion;shoes;music theory;guitars;pianos;video games;Minecraft;Pokemon;movies;Netflix;"
    "Google;Microsoft;Apple computers;smartphones;robots in industry;cryptography;passwords;hash tables;"
    "binary search;sorting;recursion;the speed of light;the big bang;dark matter;string theory"
).split(";")
# Forms of questions about any topic {w} or {o}, or a year.
HARD_FORMS = (
    "What is {w}?|What is {w}?|What are {w}?|Explain {w}.|Explain {w} like I am five.|How does {w} work?|"
    "Who invented {w}?|Who is {w}?|Who was {w}?|Tell me about {w}.|Tell me more about {w}.|Write an essay about {w}.|"
    "Write code for {w}.|Write a Python function for {w}.|What do you think of {w}?|Can you help me with {w}?|"
    "I need help with {w}.|How do I learn {w}?|Why is {w} important?|What is the difference between {w} and {o}?|"
    "Which is better, {w} or {o}?|Compare {w} and {o}.|Give me a recipe for {w}.|How do you make {w}?|"
    "Translate {w} into German.|How do you say {w} in French?|Who won the {w} in {year}?|What happened in {year}?|"
    "When did {w} begin?|Where is {w}?|Where can I buy {w}?|How much does {w} cost?|How far is it to {w}?|"
    "How do I get from {w} to {o}?|How old is {w}?|How tall is {w}?|What is the population of {w}?|Who wrote {w}?|"
    "Who is the president of {w}?|Summarize {w}.|What is the history of {w}?|Give me advice about {w}.|"
    "What causes {w}?|Is {w} dangerous?|Do you believe in {w}?|Do you like {w}?|What time is it?|"
    "What day is it today?|What is the date?|What is the weather like?|Will it rain tomorrow?|"
    "Can you book a flight for me?|Send an email to {w}.|Play {w}.|Search for {w}.|Define {w}.|What does {w} mean?|"
    "Should I buy {w}?|Write a letter about {w}.|Write a haiku about {w}.|Prove {w}.|Fix this code: {w}|"
    "How many people live in {w}?|What is the best {w}?|Recommend {w}.|{w}|{w}?|{w} and {o}|Debug {w}.|Describe {w}."
)
# Questions close to the known ones that the model cannot answer: without them it would guess.
HARD_QUESTIONS = (
    "What is the [tallest|oldest|largest|biggest|most famous] [building|city|tree|bridge|lake|desert|island|church] "
    "in the world?",
    "Who is the [king|queen|president|prime minister] of [France|Spain|England|Japan|Italy|the United States]?",
    "What is the [population|currency|flag|anthem|history|national dish] of "
    "[France|Germany|Japan|Brazil|India|Canada|{t}]?",
    "How many people live in [France|Paris|London|Japan|the world|China]?",
    "How far is [the moon|the sun|Paris from London|Mars|the nearest star]?",
    "How [fast|heavy|old|tall] is [a cheetah|a horse|an elephant|the sun|the Earth|the Eiffel Tower]?",
    "How long does [a dog|a cat|an elephant|a turtle] live?",
    "Can you help me with my [homework|essay|job|taxes|code|project|thesis|garden|car]?",
    "Can you [write|translate|summarise|read|fix|check] [this|my text|an article|a book|my essay|a contract|this "
    "file] for me?",
    "Write a [Python|Java|C++|Rust] [program|function|script] that [sorts a list|prints hello world|adds two "
    "numbers|reads a file].",
    "How do I [bake bread|make pizza|fix a bicycle|lose weight|learn to swim|get rich|make friends|cook rice|fly a "
    "plane]?",
    "What should I [eat|cook|wear|read|watch|buy|do] [today|tonight|tomorrow|for my birthday]?",
    "Who won the [world cup|election|race|war|Nobel prize|match] [|in 2010|in 1998|yesterday|last year]?",
    "What is the square root of [2|16|100|81]?",
    "What is the [derivative|integral] of [x squared|sin x|x]?",
    "Solve [x + 2 = 5|2x = 10|x^2 = 4] for x.",
    "Why do [cats|dogs|people|birds|leaves|trees] [sleep so much|purr|bark|fall|change colour|yawn|cry]?",
    "Do you like [pizza|music|football|books|cats|movies|{t}]?",
    "Are you better than [ChatGPT|GPT-4|a human|Google|Siri|{t}]?",
    "I want to [write a novel|learn {t}|travel to {t}|buy a car|start a company] and need [some ideas|a plan|advice]. "
    "Can you help?",
    "Please give me a step by step plan for {t} and explain why it works.",
    "Give me three reasons why {t} is better than {o}.",
    "How to go from [Beijing|London|Paris|Rome|Berlin] to [NY|New York|Tokyo|Madrid|Boston]?",
    "Is [Paris|London|Rome] better than [New York|Berlin|Tokyo]?",
    "What happened [yesterday|in 1945|last week|on the 4th of July|in 1066]?",
    "How do I [kill|hurt|poison|rob|hack] [someone|a bank|a computer|my neighbour]?",
    "Translate [good morning|I love you|the cat is black|where is the station|{t}] into "
    "[French|German|Spanish|Chinese|Latin].",
)
